"""What travels: protobuf messages to and from plain values, tensors, fragments, errors."""
