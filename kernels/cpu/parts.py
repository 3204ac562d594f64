"""Functions that kernels are made of: compiled to LLVM's language alone, and optimised as parts of the kernel.

Numba would make machine code of every function, and optimise it once more inside each of its callers, all the way up.
A step is a hundred functions, up to eight deep, of which Python calls one.
"""

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, CompileResult, DefaultPassBuilder

from tinygpt.kernels.compiling import ANNOUNCER


class PartCompiler(CompilerBase):
    """What Numba takes as `pipeline_class`: its own passes, up to what a caller needs."""

    def define_pipelines(self) -> list:
        state = self.state
        state.flags.no_compile = True
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return [DefaultPassBuilder.define_nopython_pipeline(state)]

    def compile_extra(self, func) -> CompileResult:
        ANNOUNCER.part(func.__name__)
        result, key = super().compile_extra(func), [].append  # to find it by: Numba wants a built-in function
        self.state.targetctx.insert_user_function(key, result.fndesc, [result.library])
        return result._replace(entry_point=key)


class _PartLibrary(JITCodeLibrary):
    """A function with those that it calls, not optimised."""

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True
