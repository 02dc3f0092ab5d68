"""Compiled steps in files: made ahead by `jaxserve compile`, on a machine without the GPU too; loaded by the engine.

Loading one runs code from it. It happens only from a folder that the user names, and only what the folder's manifest
has the digest of.
"""
