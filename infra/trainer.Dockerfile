# syntax=docker/dockerfile:1
# The image of the training side with verl, on GPU machines, with SGLang or with `--build-arg ENGINE=vllm`.
#
#   docker buildx build --platform linux/amd64 --file infra/trainer.Dockerfile --tag REPOSITORY:TAG --push .
#
# The bases are verl's published images for the engines that verl 0.9.1 pins. They bring CUDA, torch, the engine,
# flash-attn and Megatron, and not verl. See "Base images" in infra/README.md for what is pinned.
ARG ENGINE=sglang

FROM verlai/verl:sgl0512.latest AS sglang
# verl starts the servers, and they sleep while it trains: their /health must not generate.
ENV LOCK=trainer-requirements.txt \
    SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0

FROM verlai/verl:vllm024.dev2@sha256:b867883b0dd011363e69ab2ab344922a28c5bd0409e2a324e3ee70fb27ca7543 AS vllm
ENV LOCK=trainer-vllm-requirements.txt

FROM ${ENGINE}
ARG ENGINE
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

COPY pyproject.toml README.md infra/trainer-requirements.txt infra/trainer-vllm-requirements.txt /backend/
COPY agent_wrapper /backend/agent_wrapper
COPY rollout_backend /backend/rollout_backend
# The lock is one resolution with the engine's pins; for SGLang's transformers, see trainer-overrides.txt. pip keeps what
# the base image has where the version is right, as torch's build for its CUDA. verl's NCCL checkpoint engine imports
# cupy, and verl does not require it.
RUN pip install --no-deps --require-hashes --requirement "/backend/$LOCK" \
    && pip install --no-deps --no-build-isolation /backend
# A base image of other versions must not pass unnoticed.
RUN python3 -c "import pathlib, re; from importlib.metadata import version; \
wanted = dict(re.findall(r'(?m)^([\w-]+)==([^\s;]+)', pathlib.Path('/backend/$LOCK').read_text())); \
found = {name: version(name).split('+')[0] for name in ('verl', '$ENGINE', 'torch', 'transformers', 'cupy-cuda13x')}; \
wrong = {name: (has, wanted[name]) for name, has in found.items() if has != wanted[name]}; \
assert not wrong, f'versions in the image, and in the lock: {wrong}'"

# verl's images run as root. Caches of compiled kernels go to the home.
RUN useradd --create-home --uid 10001 trainer
ENV HOME=/home/trainer
WORKDIR /home/trainer
USER 10001
