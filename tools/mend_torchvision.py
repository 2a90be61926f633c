"""Lets PyPI's torchvision, a CUDA build, be imported beside torch's CPU build: `make setup-vllm`.

Its compiled operators do not load there, and its Python parts register gradients for two of them
that then do not exist. This adds their declarations, without which `import torchvision` fails; to
call one still raises. vLLM imports torchvision for image processors, which do without operators.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

VERSION = "0.28.0"
MARK = "# Declared by m3rl's tools/mend_torchvision.py"
DECLARATIONS = f"""

{MARK}
if not _has_ops():
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(
                f"torchvision::{{name}}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
"""


def mend(file: Path) -> bool:
    """Append the declarations to torchvision's `extension.py`, once; False: they were there.

    Raises:
        ValueError: it does not load its operators as this version does.
    """
    text = file.read_text(encoding="utf-8")
    if MARK in text:
        return False
    if "def _has_ops" not in text or "import torch" not in text:
        raise ValueError(f"{file}: not the extension.py of torchvision {VERSION}")
    file.write_text(text + DECLARATIONS, encoding="utf-8")
    return True


def main() -> int:
    """Exit code: 0, or 1 where this environment has no torchvision of the right version."""
    try:
        distribution = importlib.metadata.distribution("torchvision")
    except importlib.metadata.PackageNotFoundError:
        print(f"torchvision is not installed; pip install --no-deps torchvision=={VERSION}")
        return 1
    if distribution.version.partition("+")[0] != VERSION:
        print(f"torchvision is {distribution.version}, and {VERSION} is what this mends")
        return 1
    is_changed = mend(Path(str(distribution.locate_file("torchvision/extension.py"))))
    print(f"torchvision {VERSION}: {'mended' if is_changed else 'was mended already'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
