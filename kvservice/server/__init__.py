"""gRPC servers: the transport around a service, which they know by its descriptor."""
