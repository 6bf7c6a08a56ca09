# SPDX-License-Identifier: Apache-2.0
# Builds tfdist_ext for processors from this tree, and runs the demo:
#   docker build -t tfdist_ext .
#   docker run --rm tfdist_ext
# Your own program, in this folder:
#   docker run --rm -v "$PWD:/app" tfdist_ext tfdist-run -n 2 train.py
FROM python:3.11-slim AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++
ENV PATH=/venv/bin:$PATH
WORKDIR /source
COPY requirements-tf2.21.txt .
RUN python -m venv /venv \
    && pip install --no-cache-dir -c requirements-tf2.21.txt \
        tensorflow-cpu==2.21.0 matplotlib "setuptools>=77"
COPY . .
RUN pip install --no-cache-dir --no-build-isolation .

FROM python:3.11-slim
ENV PATH=/venv/bin:$PATH TF_CPP_MIN_LOG_LEVEL=2
COPY --from=build /venv /venv
COPY examples /app/examples
WORKDIR /app
CMD ["tfdist-run", "-n", "2", "examples/ctr.py", "--report", "report.png"]
