#!/bin/bash
# master | pserver | trainer | masterless | host | launcher: starts that service, reachable at the container's address. Any other command is run unchanged.
set -euo pipefail

role="${1:-}"
case "$role" in
master) module=master_service ;;
pserver) module=pserver_service ;;
trainer) module=trainer_agent ;;
masterless) module=trireme.masterless ;;
host) module=trireme.host ;;
launcher) module=trireme.docker ;;
*) exec "$@" ;;
esac

# A container may have several addresses. Others reach the one from which packets leave: networks without a way out are for etcd alone.
own_address() {
    python3 -I -S -c 'import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect(("192.0.2.1", 9))  # sends nothing
print(s.getsockname()[0])' 2>/dev/null || hostname -i | cut -d' ' -f1
}

export TRIREME_HOST="${TRIREME_HOST:-0.0.0.0}"
export TRIREME_ADVERTISE="${TRIREME_ADVERTISE:-$(own_address)}"
if [ "$role" = host ]; then # its name in the pool is the container's; hosts may share a volume
    export TRIREME_DATA_DIR="${TRIREME_DATA_DIR:-/var/lib/trireme}/$(hostname)"
else
    export TRIREME_NAME="${TRIREME_NAME:-$role-$(hostname)}"
fi
exec python -P -m "$module"
