#!/bin/sh
# Install into the images' environment: `light` or `all` packages as pinned with extras, or `cloister` itself beside it.
set -eu
if ls /wheels/*.whl >/dev/null 2>&1; then
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels
fi
if [ "$1" = cloister ]; then
    exec /opt/cloister/bin/pip install --quiet --no-deps --prefix /package .
fi
python3 requirements.py "$@" >requirements.txt
/opt/cloister/bin/pip install --quiet --no-compile --requirement requirements.txt --constraint constraints.txt
# 430 MB of C++ headers that nothing here compiles against.
rm -rf /opt/cloister/lib/python3*/site-packages/tensorflow/include
# On all cores; containers cannot write bytecode later. Templates that are no Python are passed over.
/opt/cloister/bin/python -m compileall -q -j 0 /opt/cloister/lib >/dev/null || true
