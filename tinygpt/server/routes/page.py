"""The page at `/`: one HTML file, which may run what stands in it and talk to this server, and nothing else."""

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

PAGE = Path(__file__).resolve().parent / "page.html"


def routes() -> list[Route]:
    html = PAGE.read_text(encoding="utf-8")
    headers = {
        "content-security-policy": content_security_policy(html),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }

    async def page(request: Request) -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    return [Route("/", page)]


def content_security_policy(html: str) -> str:
    """Scripts and styles by their hashes: what gets into the page in another way does not run."""
    return (
        f"default-src 'none'; script-src {_hashes('script', html)}; style-src {_hashes('style', html)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(tag: str, html: str) -> str:
    found = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
