# GPUs: CUDA's libraries come with torch's own wheels. Not run on hardware.
#   docker build -f deploy/cuda.Dockerfile -t startrail:cuda .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 startrail:cuda check all
ARG BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04
FROM ${BASE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Triton compiles its launcher with gcc.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/startrail
ENV PATH=/opt/venv/bin:$PATH
# torch by itself, so that changes of startrail do not install it again.
COPY constraints.txt ./
RUN python3 -m venv /opt/venv && pip install --no-cache-dir -r constraints.txt
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt '.[transformers,train]'

WORKDIR /workspace
ENTRYPOINT ["startrail"]
CMD ["doctor"]
