# The daemon with all extras: no root, a read-only root file system, one volume. `docs/install.md` says how it is run.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY requirements requirements
# The core alone: --build-arg LOCKS="-r requirements/runtime.lock"
ARG LOCKS="-r requirements/runtime.lock -r requirements/extras.lock"
RUN python -m venv /opt/covenant && /opt/covenant/bin/pip install --no-cache-dir --require-hashes ${LOCKS}
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN /opt/covenant/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:${PYTHON}-slim
RUN useradd --system --uid 10001 --home-dir /var/lib/covenant --shell /usr/sbin/nologin covenant \
 && install --directory --mode=700 --owner=covenant --group=covenant /var/lib/covenant
COPY --from=build /opt/covenant /opt/covenant
ENV PATH=/opt/covenant/bin:$PATH \
    COVENANT_HOME=/var/lib/covenant \
    COVENANT_HTTP_BIND_ADDR=0.0.0.0 \
    COVENANT_LOG_FORMAT=json \
    PYTHONDONTWRITEBYTECODE=1
USER 10001
VOLUME /var/lib/covenant
EXPOSE 8421
STOPSIGNAL SIGTERM
# Over the socket in the home: whatever port and certificates the settings name.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 CMD ["covenant", "a2a", "status"]
ENTRYPOINT ["covenant"]
CMD ["serve"]
