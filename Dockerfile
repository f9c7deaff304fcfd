# The image of ENGINE=kubernetes (docs/kubernetes.md): torch with CUDA, and this checkout.
#
#     docker build --tag registry.example.org/kmatrix:1.0 .
#
# Its packages are those of constraints.txt, by their hashes; CUDA comes with them, so the base image has none. The
# layers that change rarely come first: a change of the code alone builds and pushes a few megabytes.
FROM python:3.11.11-slim-bookworm

# gcc: torch.compile (Triton) builds its launchers with it. git: the code's version is recorded with results.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc git libc6-dev make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/kmatrix
# A number, so that Kubernetes can check that it is not root. K8S_USER replaces it.
RUN useradd --uid 1000 --create-home kmatrix && chown kmatrix:kmatrix /opt/kmatrix
USER 1000

COPY --chown=1000 scripts/setup.sh scripts/setup.sh
COPY --chown=1000 pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir -p lib/kmatrix && sh scripts/setup.sh core && sh scripts/setup.sh train && sh scripts/setup.sh trackers \
    && rm -rf "$HOME/.cache"

COPY --chown=1000 . .
ENV PATH=/opt/kmatrix/.venv/bin:$PATH \
    PYTHONPATH=/opt/kmatrix/lib:/opt/kmatrix \
    PYTHONUNBUFFERED=1
CMD ["bash"]
