#!/bin/sh
# Collect the images' Python packages in docker/wheels with this machine's own pip, its mirror, proxy and certificates.
# A build that finds packages there asks no index. So nothing of this machine's configuration enters a build, and the
# folder can be carried to a site without a network. Usage: docker/wheels.sh [python [extra ...]]
set -eu
cd "$(dirname "$0")/.."
python=${1:-python3}
[ $# = 0 ] || shift
[ $# -gt 0 ] || set -- keras
find docker/wheels -name '*.whl' -delete
"$python" docker/requirements.py all "$@" >docker/wheels/requirements.txt
"$python" -m pip download --quiet --dest docker/wheels --constraint constraints.txt --only-binary :all: \
    --python-version 3.11 --requirement docker/wheels/requirements.txt 'setuptools>=77'
rm docker/wheels/requirements.txt
du -sh docker/wheels
