#!/bin/bash
# The service `cli`: commands of trireme, `show-token [admin|viewer|member|grafana]`, and a few programs for files of the volumes; `cat` and `ls`
# take URLs of the storage as well.
set -euo pipefail

case "${1:-}" in
show-token)
    role="${2:-admin}"
    case "$role" in
    admin | viewer) exec cat "/secrets/$role/$role" ;;
    member) exec cat /secrets/members/member ;;
    grafana) exec cat /secrets/grafana/password ;;
    *)
        echo "there is no role $role: give admin, viewer, member or grafana" >&2
        exit 2
        ;;
    esac
    ;;
cat | ls)
    case "${2:-}" in
    *://*) exec python -P -m trireme.containers.urls "$@" ;;
    *) exec "$@" ;;
    esac
    ;;
cp | du | find | mkdir | mv | python | rm | tar) exec "$@" ;;
*) exec trireme "$@" ;;
esac
