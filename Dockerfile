# A GPU node: CUDA 13, SGLang with its kernels, Transformer Engine, megatron-core, Ray, this package.
#
#   docker build -t mcore_rl . && docker run --gpus all --ipc host --network host -v $PWD/runs:/opt/mcore_rl/runs mcore_rl
#
# Without a command it checks the machine (mcore-rl doctor). --build-arg RUN_AS=mcore makes an image that does not run as
# root; SkyPilot wants root, Kubernetes takes either. --build-arg WITH_APEX=1 adds apex, which nothing needs.
#
# requirements/gpu.txt has every version, and they hang together: SGLang 0.5.23 and its kernel wheels are built for torch
# 2.14.1 and CUDA 13 (a machine without CUDA keeps torch 2.13.0, see requirements/cpu.txt). All but one come as wheels,
# DeepEP among them (sgl-deep-ep). Transformer Engine's PyTorch half comes as source: requirements/te_wheel has g++ compile
# it. cuDNN and NCCL come from torch's own wheels. The second stage has the environment that the first one built and, of
# CUDA, what kernels that are compiled while a run goes on need (DeepGEMM, FlashInfer: nvcc and the headers of its
# runtime). docs/status.md says what of this image was tried.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04 AS build

ARG WITH_APEX=0
ARG APEX_REF=25.09
ARG TORCH_CUDA_ARCH_LIST="9.0;10.0"
ARG MAX_JOBS=16

ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH

# Ubuntu 24.04 has Python 3.12.
RUN apt-get update && apt-get install --yes --no-install-recommends \
        python3 python3-dev python3-venv git build-essential ninja-build cmake libibverbs1 && \
    rm -rf /var/lib/apt/lists/* && \
    python3 -m venv $VIRTUAL_ENV

WORKDIR /opt/mcore_rl
COPY requirements/gpu.txt requirements/te_wheel requirements/
RUN MAX_JOBS=$MAX_JOBS requirements/te_wheel python /tmp/wheels && \
    pip install --no-deps --no-build-isolation --find-links /tmp/wheels -r requirements/gpu.txt

# Megatron takes apex's multi-tensor kernels where they are there. apex refuses an nvcc of another CUDA than torch's.
RUN if [ "$WITH_APEX" = 1 ]; then \
        git clone --depth 1 --branch $APEX_REF https://github.com/NVIDIA/apex /tmp/apex && \
        APEX_CPP_EXT=1 APEX_CUDA_EXT=1 MAX_JOBS=$MAX_JOBS TORCH_CUDA_ARCH_LIST=$TORCH_CUDA_ARCH_LIST \
        pip install --no-build-isolation /tmp/apex && \
        rm -rf /tmp/apex; \
    fi

COPY pyproject.toml setup.py README.md LICENSE NOTICE ./
COPY mcore_rl mcore_rl
COPY checkpoint_tools checkpoint_tools
COPY launch launch
COPY recipes recipes
RUN pip install --no-deps --no-build-isolation . && pip check

FROM nvidia/cuda:13.0.1-base-ubuntu24.04

ARG RUN_AS=root

ENV DEBIAN_FRONTEND=noninteractive \
    VIRTUAL_ENV=/opt/venv \
    CUDA_HOME=/usr/local/cuda \
    PATH=/opt/venv/bin:/usr/local/cuda/bin:$PATH

# libnuma and ibverbs serve SGLang's and NCCL's transports; KubeRay's probes of a pod's health call wget.
RUN apt-get update && apt-get install --yes --no-install-recommends \
        python3 python3-dev g++ ninja-build cuda-nvcc-13-0 cuda-cudart-dev-13-0 cuda-nvrtc-dev-13-0 cuda-cccl-13-0 libcurand-dev-13-0 \
        libnuma1 libibverbs1 librdmacm1 ibverbs-providers wget && \
    rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/venv /opt/venv

# Ubuntu's image has a user of number 1000 already, which people's own number on a workstation often is.
RUN userdel --remove ubuntu && useradd --create-home --uid 1000 mcore && \
    mkdir -p /opt/mcore_rl/runs && chown -R $RUN_AS /opt/mcore_rl
WORKDIR /opt/mcore_rl

USER $RUN_AS
ENTRYPOINT ["mcore-rl"]
CMD ["doctor"]
