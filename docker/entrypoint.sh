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
for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        try:
            s.connect((elsewhere, 9))  # sends nothing
        except OSError:
            continue  # a network without IPv4, say
        print(s.getsockname()[0])
        break
else:
    raise SystemExit(1)' 2>/dev/null || hostname -i | cut -d' ' -f1
}

export TRIREME_ADVERTISE="${TRIREME_ADVERTISE:-$(own_address)}"
case "$TRIREME_ADVERTISE" in
*:*) export TRIREME_HOST="${TRIREME_HOST:-::}" ;; # IPv6 alone
*) export TRIREME_HOST="${TRIREME_HOST:-0.0.0.0}" ;;
esac
case "${TRIREME_NAME:-}" in /*) unset TRIREME_NAME ;; esac # of a link of Docker's, nobody's setting
if [ "$role" = host ]; then # its name in the pool is the container's; hosts may share a volume
    export TRIREME_DATA_DIR="${TRIREME_DATA_DIR:-/var/lib/trireme}/$(hostname)"
else
    export TRIREME_NAME="${TRIREME_NAME:-$role-$(hostname)}"
fi
exec python -P -m "$module"
