"""Measurements, each a command: `python -m bench.throughput`, `latency`, `memory`, `cold_start`, `host_overhead`,
`kv_waste`. All take --help and --json FILE."""
