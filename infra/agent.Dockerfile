# syntax=docker/dockerfile:1
# The image of an agent: its folder, its requirements, and the wrapper. A folder with its own Dockerfile is built with
# that one instead.
#
#   docker buildx build --platform linux/arm64 --build-context wrapper=. --file infra/agent.Dockerfile my_agent
#
# The base image is ECR's copy of the official one: Docker Hub limits anonymous pulls, of CodeBuild in particular.
# AgentCore requires arm64 and port 8080. The folder holds agent.py, which ends in `app.run()`, and may hold
# requirements.txt. agent.Dockerfile.dockerignore says which files of the folder stay out of the image.
FROM public.ecr.aws/docker/library/python:3.12.11-slim-bookworm

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

RUN useradd --create-home --uid 1000 agent
WORKDIR /app

# The image has only the wrapper, with the versions that it was tested with, and not the training side.
COPY --from=wrapper pyproject.toml README.md constraints/agent.txt /wrapper/
COPY --from=wrapper agent_wrapper /wrapper/agent_wrapper
RUN pip install --require-hashes --requirement /wrapper/agent.txt \
    && pip install --no-deps --no-build-isolation /wrapper

COPY . .
# The agent's requirements are installed second and take precedence; `pip check` fails if they break the wrapper's.
RUN if [ -f requirements.txt ]; then pip install --requirement requirements.txt && pip check; fi
USER 1000
EXPOSE 8080
CMD ["python", "agent.py"]
