"""What the other wings stand on: clients of AWS, retries, logs, tracing, processes, queues and files."""
