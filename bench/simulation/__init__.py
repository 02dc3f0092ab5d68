"""The real Scheduler and BlockPool in virtual time: see `bench.simulate`."""
