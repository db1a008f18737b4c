"""Devices and processes: the mesh, sharding, agreeing and stopping together."""
