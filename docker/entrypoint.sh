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

if [ "$role" = host ]; then
    export TRIREME_DATA_DIR="${TRIREME_DATA_DIR:-/data/host}"
fi
export TRIREME_HOST="${TRIREME_HOST:-0.0.0.0}"
export TRIREME_ADVERTISE="${TRIREME_ADVERTISE:-$(hostname -i | cut -d' ' -f1)}"
export TRIREME_NAME="${TRIREME_NAME:-$role-$(hostname)}"
exec python -P -m "$module"
