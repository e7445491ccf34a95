"""The throughput benchmark: a file of requests through the engine, and the same with the conventional cache."""
