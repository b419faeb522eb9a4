"""The APIs that agents speak: each translates to and from `gateway.call`."""
