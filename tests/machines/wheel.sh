#!/bin/sh
# Install the newest wheel of a folder into an empty environment, alone and with what the quickstart needs, and train one
# step of it.
#
#   sh tests/machines/wheel.sh FOLDER TORCH MODEL PINS
set -eu
wheel=$(ls -t "$PWD/$1"/*.whl | head -n 1)
pins=$(echo "$4" | sed "s#-c #-c $PWD/#")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "$2"
# shellcheck disable=SC2086
env/bin/pip install -q $pins "$wheel"
env/bin/podium --help >/dev/null
env/bin/python -c "import podium; podium.GRPOTrainer, podium.check"
# shellcheck disable=SC2086
env/bin/pip install -q $pins "$wheel[builtin,report]"
env/bin/pip install -q --no-deps "$3"
env/bin/podium train quickstart --max_steps 1 --no-eval
test -s runs/quickstart/model.safetensors
