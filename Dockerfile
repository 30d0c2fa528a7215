# The course in a container, on the CPU; docs/install.md says how to build and run it.
FROM python:3.12-slim

# What the wheels of pygraphviz want of the system.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends fontconfig libexpat1 libglib2.0-0 libx11-6 libxext6 libxrender1 \
 && rm -rf /var/lib/apt/lists/*

# The folder for the learner's own notebooks exists, so that a volume mounted there belongs to the learner.
RUN useradd --create-home learner && su learner -c "mkdir -p ~/hooklab/my-notebooks"
WORKDIR /home/learner/hooklab

# PyTorch and the rest are loaded again only when pyproject.toml changes. uv takes the pins from it, pip would not.
COPY pyproject.toml ./
RUN python -m venv /tmp/uv && /tmp/uv/bin/pip install --no-cache-dir --quiet uv \
 && /tmp/uv/bin/uv pip install --system --no-cache --torch-backend=cpu --all-extras -r pyproject.toml \
 && rm -rf /tmp/uv

COPY --chown=learner README.md LICENSE ./
COPY --chown=learner hooklab hooklab
COPY --chown=learner labextension labextension
RUN pip install --no-cache-dir --no-deps --editable .

# Last, since these change most often.
COPY --chown=learner QUESTIONS.md QUESTIONS.zh-CN.md ./
COPY --chown=learner docs docs
COPY --chown=learner notebooks notebooks

USER learner
# What JupyterLab keeps, and with it the learner's progress, lies beside the notebooks: one volume keeps both.
ENV JUPYTER_DATA_DIR=/home/learner/hooklab/my-notebooks/.jupyter
EXPOSE 8888
# Inside the container 0.0.0.0 is what the published port leads to; who may come in is decided by `docker run -p`.
CMD ["hooklab", "lab", "--ip=0.0.0.0", "--port=8888"]
