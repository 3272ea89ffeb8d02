"""Carriers between machines: gRPC (an extra), a relay, calls of NVFlare's; certificates for TLS."""
