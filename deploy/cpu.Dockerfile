# CPUs: everything that a clone can do. The build sets up .venv, and a run is `make test`.
#   docker build -f deploy/cpu.Dockerfile -t startrail:cpu .
#   docker run --privileged startrail:cpu            # the emulated clusters of some tests need network namespaces
ARG BASE=python:3.11-bookworm
FROM ${BASE}

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends chromium chromium-driver iproute2 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/startrail
# torch's builds without CUDA, which are much smaller
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY . .
RUN make setup

CMD ["make", "test"]
