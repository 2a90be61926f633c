"""Kernels run on the GPU where there is one, else in Triton's interpreter on the CPU."""

import functools
import os
from typing import Any

import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined, so it must be set before any test file is imported.
    os.environ["TRITON_INTERPRET"] = "1"


def patch_once_a_launch() -> None:
    """Have the interpreter put its functions in the language's place once for each launch.

    It does so at each call of a device function, where all are in place already: half of its time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    @functools.cache
    def languages(fn: Any) -> list[Any]:
        visible = {id(value) for value in fn.__globals__.values()}
        return [language for language in (tl, tl.core) if id(language) in visible]

    def patch_if_needed(fn: Any) -> Any:
        is_original = [tl.core.is_builtin(language.arange) for language in languages(fn)]
        return patch(fn) if any(is_original) else interpreter._LangPatchScope()

    interpreter._patch_lang = patch_if_needed


if os.environ.get("TRITON_INTERPRET") == "1":
    patch_once_a_launch()
