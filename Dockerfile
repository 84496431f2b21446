# megappo on GPUs: NVIDIA's PyTorch with Transformer Engine and Apex, Megatron-Core, SGLang with its CUDA parts.
#
#   docker build -t megappo .
#   docker run --gpus all --shm-size 32g --ulimit nofile=65536 --ulimit memlock=-1 -v /data:/data megappo \
#       python -m megappo.launch --nproc-per-node 8 /opt/megappo/configs/qwen2.5_7b_gsm8k.yaml
#
# Written from the projects' own requirements, and not built yet: docs/gpu.md.
# This release has CUDA 13.1, Python 3.12 and PyTorch 2.10. A tag can be moved: for builds that stay the same write its
# digest instead (pytorch@sha256:..., shown by docker buildx imagetools inspect).
FROM nvcr.io/nvidia/pytorch:25.12-py3

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=1
WORKDIR /opt/megappo

# Packages first: they change less often than the code. The image's constraints would refuse our pins, so ours take
# their place and hold what our packages need in turn, but for what the image's torch and kernels were built with; that
# torch is the image's own still is compared. wandb and MLflow are for `loggers`.
COPY requirements/cpu.txt requirements/constraints.txt requirements/gpu-sglang.txt requirements/tracking.txt requirements/
RUN before="$(python -c 'import torch; print(torch.__version__)')" \
    && grep -hv '^torch==' requirements/cpu.txt requirements/tracking.txt > /tmp/packages.txt \
    && grep -vE '^(torch|torchvision|triton|numpy)==' requirements/constraints.txt > /tmp/constraints.txt \
    && PIP_CONSTRAINT= pip install -c /tmp/constraints.txt -r /tmp/packages.txt \
    && PIP_CONSTRAINT= pip install --no-deps -r requirements/gpu-sglang.txt \
    && rm /tmp/packages.txt /tmp/constraints.txt \
    && test "$before" = "$(python -c 'import torch; print(torch.__version__)')"

COPY setup.py pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY megappo megappo
COPY launch launch
COPY configs configs
COPY tools tools
RUN PIP_CONSTRAINT= pip install --no-deps --no-build-isolation -e .

# Kernels need a GPU to run; that all parts are there, can be imported and have the tested versions is known now. The
# driver's library comes from the host later; until then the image's compatible one stands in.
RUN LD_LIBRARY_PATH="/usr/local/cuda/compat/lib.real:${LD_LIBRARY_PATH:-}" python -m megappo.doctor.image

RUN useradd --create-home --uid 10001 megappo && mkdir -p /data && chown megappo /data
USER megappo
WORKDIR /data
CMD ["megappo", "doctor"]
