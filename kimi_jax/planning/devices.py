"""What accelerators hold: the memory that a plan may count on. Nothing here asks the machine."""

GIB = 1 << 30
# Memory in GiB as the driver reports it, rounded down: an "H200 141 GB" has 139.8.
DEVICES = {"A100": 79, "H100": 79, "H200": 139, "B200": 178}
RESERVED = 1  # GiB: the CUDA context, NCCL's buffers, compiled code


def usable(device: str | int) -> int:
    """Bytes of a device that a plan may use: its memory in DEVICES less RESERVED, or the number itself."""
    if isinstance(device, int):
        return device
    if device not in DEVICES:
        raise ValueError(f"device={device!r}: one of {', '.join(DEVICES)} was wanted, or a number of bytes")
    return (DEVICES[device] - RESERVED) * GIB
