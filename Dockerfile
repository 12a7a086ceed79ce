FROM python:3.11-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 overwinter \
    && mkdir -p /app /cache \
    && chown overwinter:overwinter /app /cache
USER overwinter
WORKDIR /app
ENV XDG_CACHE_HOME=/cache PIP_NO_CACHE_DIR=1 PATH=/app/.venv/bin:$PATH

COPY --chown=overwinter:overwinter pyproject.toml README.md LICENSE Makefile ./
COPY --chown=overwinter:overwinter engine engine
COPY --chown=overwinter:overwinter api api
COPY --chown=overwinter:overwinter offload offload
# Passed on to pip when it installs torch.
ARG TORCH_ARGS=
RUN make setup TORCH_ARGS="$TORCH_ARGS"

# Converted models, built kernels, and the disk tier: token ids and KV of chats are stored here.
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["overwinter", "serve", "--host", "0.0.0.0", "--disk-tier", "/cache/overwinter/kv"]
