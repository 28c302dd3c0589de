#!/bin/bash
# Submits an example of the image to the cluster, once in the cluster's life: TRIREME_EXAMPLE=digits; empty: none.
set -euo pipefail

example="${TRIREME_EXAMPLE:-}"
if [ -z "$example" ]; then
    echo "no example is submitted (EXAMPLE is empty)"
    exit 0
fi
script="/opt/trireme/examples/$example/$example.py"
if [ ! -e "$script" ]; then
    echo "there is no example $example; there are: $(cd /opt/trireme/examples && echo */)" >&2
    exit 2
fi
submitted="/storage/.examples/$example"
if [ -e "$submitted" ]; then
    echo "the example $example was submitted before; again: docker compose run --rm cli submit $script --name $example-2"
    exit 0
fi
# compose does not wait for a master that leads: see docker-compose.yml
until trireme jobs > /dev/null 2>&1; do
    if [ "$SECONDS" -gt 120 ]; then
        echo "no master has answered at $TRIREME_URL for 120 s; the last answer:" >&2
        exec trireme jobs
    fi
    sleep 1
done
code=0
trireme submit "$script" --name "$example" || code=$?
if [ "$code" -ne 0 ] && ! trireme status "$example" > /dev/null 2>&1; then
    exit "$code"
fi
mkdir -p "${submitted%/*}"
touch "$submitted"
