# syntax=docker/dockerfile:1
# The image of an agent that runs in the images of Harbor tasks, on Kubernetes: /agent holds a Python that runs from any
# folder, the wrapper, the agent's requirements and its files. The backend copies /agent into each container of a task.
#
#   docker buildx build --platform linux/amd64 --build-context wrapper=. --file infra/harbor-agent.Dockerfile my_agent
#
# The folder holds requirements.txt, such as `mini-swe-agent==2.4.6`, and other files that the agent needs, which are in
# /agent/files. The Python is built for glibc 2.17 and newer, so it runs in images of Debian, Ubuntu, Fedora and others,
# but not of Alpine. harbor-agent.Dockerfile.dockerignore says which files of the folder stay out of the image.
FROM debian:12.11-slim AS build

COPY --from=ghcr.io/astral-sh/uv:0.9.5 /uv /usr/local/bin/
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates
ENV UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_NO_CACHE=1

RUN uv python install --install-dir /agent/python 3.12.11 \
    && set -- /agent/python/cpython-3.12.* \
    && ln -s "$1/bin" /agent/bin
# The wrapper has the versions that it was tested with. The agent's requirements are installed second.
COPY --from=wrapper pyproject.toml README.md constraints/agent.txt /wrapper/
COPY --from=wrapper agent_wrapper /wrapper/agent_wrapper
RUN uv pip install --python /agent/bin/python --break-system-packages --require-hashes \
        --requirement /wrapper/agent.txt \
    && uv pip install --python /agent/bin/python --break-system-packages --no-deps --no-build-isolation /wrapper
COPY . /agent/files
RUN uv pip install --python /agent/bin/python --break-system-packages --requirement /agent/files/requirements.txt \
    && uv pip check --python /agent/bin/python

FROM debian:12.11-slim
COPY --from=build /agent /agent
