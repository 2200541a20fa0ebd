"""The worker's face to the network: its verbs on protobuf messages."""
