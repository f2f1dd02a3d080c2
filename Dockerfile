# Read and not built: no machine of this project has a Docker daemon.
# CPU by default:     docker build -t slime .
# with CUDA:          docker build -t slime --build-arg BASE=nvidia/cuda:13.0.2-runtime-ubuntu24.04 --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#                     and `docker run --gpus all ...`
# with Megatron:      docker build -t slime --build-arg EXTRAS=[megatron] .
# the quickstart:     docker run --rm --shm-size=2g -v "$PWD/runs:/slime/runs" slime run --recipe quickstart
ARG BASE=ubuntu:24.04
FROM ${BASE}

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-pip \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/slime
ENV PATH=/opt/slime/bin:$PATH

# torch alone first: it is the largest layer and changes least
RUN pip install --no-cache-dir torch==2.13.0 --index-url ${TORCH_INDEX}
COPY . /opt/src
ARG EXTRAS=
RUN pip install --no-cache-dir "/opt/src${EXTRAS}"

WORKDIR /slime
ENTRYPOINT ["slime"]
CMD ["--help"]
