"""Write what tests compare with again, after a deliberate change: python tests/record.py

Public names, flags and fields; answers of commands and calls; a study's pages; the keywords that type checkers know.
Answers of other libraries are recorded by support/recorded.py, READMEs' outputs by scripts/readme_outputs.py.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
KEYWORDS = ROOT / "tinygpt" / "sampling_keywords.py"
PARAMS = ROOT / "tinygpt" / "sampling_params.py"
RECORDERS = ("test_public_api.py", "cli/test_snapshots.py", "test_calls.py", "bench/test_studies.py")


def annotated(file: Path, name: str) -> list[str]:
    """Return the annotated fields of a class, a line each."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    (of_name,) = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
    fields = [node for node in of_name.body if isinstance(node, ast.AnnAssign)]
    return [f"{ast.unparse(field.target)}: {ast.unparse(field.annotation)}" for field in fields]


def write_keywords() -> None:
    text = KEYWORDS.read_text(encoding="utf-8")
    head = text[: text.index("    max_tokens")]
    lines = [f"    {line}\n" for line in annotated(PARAMS, "SamplingParams")]
    KEYWORDS.write_text((head + "".join(lines)).replace("'never'", '"never"'), encoding="utf-8")


def main() -> int:
    write_keywords()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])}
    for recorder in RECORDERS:
        subprocess.run([sys.executable, TESTS / recorder], cwd=ROOT, env=environment, check=True)
    return subprocess.run(["git", "--no-pager", "diff", "--stat"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
