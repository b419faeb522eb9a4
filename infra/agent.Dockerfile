# syntax=docker/dockerfile:1
# The image of an agent: its folder, its requirements, and the wrapper. A folder with a Dockerfile of its own is
# built with that one instead.
#
#   docker buildx build --platform linux/arm64 --build-context wrapper=. --file infra/agent.Dockerfile my_agent
#
# AgentCore wants arm64 and port 8080. The folder holds agent.py, which ends in `app.run()`, and may hold
# requirements.txt.
FROM python:3.12-slim

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

RUN useradd --create-home --uid 1000 agent
WORKDIR /app

# Only the wrapper goes in; the training side stays out of the image.
COPY --from=wrapper pyproject.toml README.md /wrapper/
COPY --from=wrapper agent_wrapper /wrapper/agent_wrapper
RUN pip install "/wrapper[agent]"

COPY . .
RUN if [ -f requirements.txt ]; then pip install -r requirements.txt; fi
USER agent
EXPOSE 8080
CMD ["python", "agent.py"]
