"""Build the dashboard from its sources: the same bytes each time.

python -m clients.build_dashboard [FOLDER]        default: master_service/dashboard/built
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from clients.tools import DASHBOARD, node, node_modules_of_dashboard, run


def build(folder: Path) -> None:
    """Its files, in place of what is in `folder`. Raises RuntimeError with what the compiler said."""
    with tempfile.TemporaryDirectory(prefix="trireme-dashboard-") as made:
        copy = Path(made) / "source"
        shutil.copytree(DASHBOARD, copy, ignore=shutil.ignore_patterns("node_modules"))
        (copy / "node_modules").symlink_to(node_modules_of_dashboard(), target_is_directory=True)
        run([node(), "build.mjs", folder.absolute()], copy)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DASHBOARD.parent / "built"
    build(target)
    print(f"{sum(path.stat().st_size for path in target.iterdir()):,} bytes in {target}")
