# syntax=docker/dockerfile:1
# An image with hvdtrain, the frameworks and Horovod, for Kubernetes and for clusters that run containers (docs/installing.md).
#
#   docker build -t hvdtrain .
#   docker build -t hvdtrain:cuda --build-arg BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 --build-arg DEVICE=cuda .
#
# tools/setup.sh installs everything, as it does without a container.
ARG BASE=debian:12-slim

FROM ${BASE} AS build
ARG DEVICE=cpu
ARG EXTRAS=mpi,hdf,huggingface,returnn,report
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
        ca-certificates cmake g++ libopenmpi-dev make openmpi-bin python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/hvdtrain
COPY pyproject.toml setup.py README.md ./
COPY tools/setup.sh tools/
COPY hvdtrain hvdtrain
# The cache keeps pip's downloads and the wheel of Horovod from one build of the image to the next.
RUN --mount=type=cache,target=/root/.cache DEVICE=${DEVICE} EXTRAS=${EXTRAS} bash tools/setup.sh

FROM ${BASE}
# sshd is for mpirun on several hosts: Kubeflow's operator for MPI starts it in each worker, with keys in /root/.ssh.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
        ca-certificates openmpi-bin openssh-client openssh-server python3 \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /run/sshd
# The operator mounts the keys from a secret, whose files and folder belong to others, and makes new hosts for every job.
RUN printf 'StrictModes no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n' >/etc/ssh/sshd_config.d/hvdtrain.conf \
    && printf 'StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n' >/etc/ssh/ssh_config.d/hvdtrain.conf
COPY --from=build /opt/hvdtrain /opt/hvdtrain
# A container's user is root; mpirun wants to be told that it is meant.
ENV PATH=/opt/hvdtrain/.venv/bin:${PATH} OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
WORKDIR /work
CMD ["hvdtrain", "doctor"]
