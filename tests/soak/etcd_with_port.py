"""`trireme`, whose own etcd has a port, so that packets to it can be dropped: otherwise it listens at a UNIX
socket.

python -m tests.soak.etcd_with_port run SCRIPT ...
"""

from __future__ import annotations

from functools import partial

from trireme.cli.app import main
from trireme.launch import supervision
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd

if __name__ == "__main__":
    supervision.EmbeddedEtcd = partial(EmbeddedEtcd, host="127.0.0.1")  # type: ignore[assignment, misc]
    main()
