"""Functions that kernels are made of: compiled to LLVM's language alone, and to machine code within their kernel.

Numba would make machine code of every function, and optimise it once more inside each of its callers, all the way up.
A step is a hundred functions, up to eight deep, of which Python calls one.
"""

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompilerBase, CompileResult, DefaultPassBuilder
from numba.core.errors import UnsupportedError


class KernelCompiler(Compiler):
    """What Numba takes as `pipeline_class`: its own, for a kernel with parts."""

    def compile_extra(self, func) -> CompileResult:
        result = super().compile_extra(func)
        for environment in result._find_referenced_environments():  # what parts need of Python, as to raise an error
            result.codegen.set_env(environment.env_name, environment)
        return result


class PartCompiler(CompilerBase):
    """The same for a part: Numba's passes, up to what a caller needs."""

    def define_pipelines(self) -> list:
        state = self.state
        state.flags.no_compile = True
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return [DefaultPassBuilder.define_nopython_pipeline(state)]

    def compile_extra(self, func) -> CompileResult:
        result, key = super().compile_extra(func), [].append  # to find it by: Numba wants a built-in function
        self.state.targetctx.insert_user_function(key, result.fndesc, [result.library])
        return result._replace(entry_point=key)

    def compile_ir(self, func_ir, lifted=(), lifted_from=None) -> CompileResult:
        """Of a block in object mode, which is machine code of its own."""
        raise UnsupportedError("a part of a kernel has a block in object mode: put it into what Python calls")


class _PartLibrary(JITCodeLibrary):
    """A function with those that it calls, optimised one by one; the kernel is optimised as a whole."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True
