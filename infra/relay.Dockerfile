# syntax=docker/dockerfile:1
# The image of the relay: the package's relay folder and what it imports, without the training side.
#
#   docker buildx build --platform linux/arm64,linux/amd64 --file infra/relay.Dockerfile --tag REPOSITORY:TAG --push .
#
# It requires ROLLOUT__RELAY__KEY in its environment. Options of `rollout relay` follow the image's name.
FROM python:3.12.11-slim-bookworm

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

RUN useradd --create-home --uid 1000 relay
COPY pyproject.toml README.md constraints/relay.txt /relay/
COPY rollout_backend/__init__.py rollout_backend/py.typed /relay/rollout_backend/
COPY rollout_backend/base/__init__.py rollout_backend/base/addresses.py rollout_backend/base/fair_queue.py /relay/rollout_backend/base/
COPY rollout_backend/base/logs.py rollout_backend/base/retry.py rollout_backend/base/waiting_connections.py /relay/rollout_backend/base/
COPY rollout_backend/model/__init__.py /relay/rollout_backend/model/
COPY rollout_backend/model/relay /relay/rollout_backend/model/relay
COPY agent_wrapper /relay/agent_wrapper
RUN pip install --require-hashes --requirement /relay/relay.txt \
    && pip install --no-deps --no-build-isolation /relay

USER 1000
WORKDIR /home/relay
EXPOSE 8080
ENTRYPOINT ["python", "-m", "rollout_backend.model.relay", "--host", "0.0.0.0"]
