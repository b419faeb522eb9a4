# syntax=docker/dockerfile:1
# The image of the training side with verl, on GPU machines.
#
#   docker buildx build --platform linux/amd64 --file infra/trainer.Dockerfile --tag REPOSITORY:TAG --push .
#
# BASE is verl's published image for SGLang 0.5.12, the version that verl 0.9.1 pins. verl's docker/README.md names the
# tag (release history, 2026-07-21). verl's images bring CUDA, torch, SGLang, flash-attn and Megatron, and not verl.
# A tag can move: pass --build-arg BASE=verlai/verl@sha256:... to build the same image again.
ARG BASE=verlai/verl:sgl0512.latest
FROM ${BASE}

# verl starts the servers, and they sleep while it trains: their /health must not generate.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0

COPY pyproject.toml README.md infra/trainer-requirements.txt /backend/
COPY agent_wrapper /backend/agent_wrapper
COPY rollout_backend /backend/rollout_backend
# The constraints are one resolution with SGLang's pins, but for transformers: see trainer-overrides.txt. pip keeps what
# the base image has where the version is right, as torch's build for its CUDA.
RUN pip install --constraint /backend/trainer-requirements.txt "/backend[verl]"
# A base image of other versions must not pass unnoticed.
RUN python3 -c "from importlib.metadata import version as v; \
found = {name: v(name).split('+')[0] for name in ('verl', 'sglang', 'torch', 'transformers')}; \
wanted = {'verl': '0.9.1', 'sglang': '0.5.12', 'torch': '2.11.0', 'transformers': '5.9.0'}; \
assert found == wanted, f'the image has {found}, not {wanted}'"
