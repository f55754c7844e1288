# By digest: what the registry gives under a tag may change. This is the index of python:3.12-slim (3.12.13, made
# 2026-08-05) by the official images' own record (docker-library/repo-info, commit 2986dca); docs/start.md ("Docker")
# has the one command that writes a newer one here.
ARG PYTHON_IMAGE=python:3.12-slim@sha256:229a2c5bfa27522db7815ea81f9bed70af17ccb9de9fc7ad142b1877b5830d36

FROM ${PYTHON_IMAGE} AS build
WORKDIR /build
COPY locks ./locks
RUN pip install --no-cache-dir --require-hashes -r locks/installer.txt \
    && python -m venv --without-pip /venv \
    && uv pip install --no-cache --compile-bytecode --python /venv/bin/python --require-hashes -r locks/run.txt
COPY pyproject.toml README.md LICENSE NOTICE config.yaml ./
COPY litellm_compaction ./litellm_compaction
RUN uv pip install --no-cache --compile-bytecode --python /venv/bin/python --no-deps --no-build-isolation .

FROM ${PYTHON_IMAGE}
COPY --from=build /venv /venv
RUN useradd --create-home --uid 10001 proxy \
    && install --directory --owner proxy --mode 0700 /data
WORKDIR /app
COPY config.yaml ./
# A generated master key and the store are kept in /data; set LITELLM_MASTER_KEY to use your own key.
# In a container 127.0.0.1 is the container itself, so LM Studio is looked for on the host.
ENV PATH=/venv/bin:$PATH \
    LITELLM_COMPACTION_HOME=/data \
    LITELLM_LOCAL_MODEL_COST_MAP=True \
    LITELLM_OFFLINE_MODE=true \
    LM_STUDIO_API_BASE=http://host.docker.internal:1234/v1 \
    PYTHONUNBUFFERED=1
USER 10001
EXPOSE 4000
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:4000/health/liveliness', timeout=4)"]
ENTRYPOINT ["litellm", "--config", "/app/config.yaml", "--host", "0.0.0.0", "--port", "4000"]
