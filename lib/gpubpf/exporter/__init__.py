"""`gpubpf exporter`: metrics of all GPU programs on a machine, for Prometheus and OpenTelemetry."""
