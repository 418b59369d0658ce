"""Where stages and weights are: devices, processes, transports and residency."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layline.errors import PlacementError
from layline.pipeline.placement import (
    Inventory,
    Placement,
    Residency,
    TransportKind,
    device_pairs,
    place,
    resident_devices,
)

relaxed = settings(max_examples=200, deadline=None, database=None)

CPU = Inventory()
GPUS = Inventory("cuda", 4)


def test_default_devices() -> None:
    assert place(3, CPU).devices == (0, 1, 2)
    assert place(3, GPUS).devices == (0, 0, 0)
    # Ordinals are those of each process.
    assert place(5, CPU, None, 2) == Placement((0, 1, 0, 1, 2), (0, 0, 1, 1, 1))


def test_the_last_stage_is_the_primary() -> None:
    assert place(3, GPUS, (2, 0, 1)).primary == 1
    assert place(4, CPU).primary == 3


@pytest.mark.parametrize(
    ("devices", "processes", "shared"),
    [((0, 1), (0, 0), False), ((0, 0), (0, 0), True), ((1, 0, 1), (0, 0, 0), True),
     ((0, 0), (0, 1), False)],
)  # fmt: skip
def test_streams_that_share_a_device(
    devices: tuple[int, ...], processes: tuple[int, ...], shared: bool
) -> None:
    assert Placement(devices, processes).multi_stream_same_device is shared


def test_a_transport_for_each_boundary() -> None:  # pipeline G13
    placement = Placement((0, 0, 1, 1, 1), (0, 0, 0, 1, 1))
    assert [placement.transport(boundary) for boundary in range(4)] == [
        TransportKind.LOCAL,
        TransportKind.PEER,
        TransportKind.PROCESS,
        TransportKind.LOCAL,
    ]


def test_every_pair_of_devices_in_a_process_needs_access() -> None:  # pipeline G14
    """Not only neighbours: any stage may read what another wrote at load."""
    for source, target in itertools.permutations((0, 1, 2), 2):
        inventory = Inventory("cuda", 3, frozenset({(source, target)}))
        with pytest.raises(
            PlacementError, match=f"device {source} to copy directly to device {target}"
        ):
            place(3, inventory, (0, 1, 2))
        assert place(3, inventory, (0, 1, 2), 3).devices == (0, 1, 2)
        assert place(3, inventory, (source, source, source)).num_stages == 3
    assert set(device_pairs((0, 1, 0, 2), (0, 0, 0, 1))) == {(0, 1), (1, 0)}


def test_more_processes_than_stages() -> None:
    with pytest.raises(PlacementError, match="pp_processes 3 is more than the 2 pipeline stages"):
        place(2, CPU, None, 3)


@pytest.mark.parametrize("devices", [(0,), (0, 1, 2), (0, 4)])
def test_devices_that_do_not_fit(devices: tuple[int, ...]) -> None:  # pipeline G8
    with pytest.raises(PlacementError, match=r"pp_devices [0-9,]+ names") as error:
        place(2, GPUS, devices)
    assert "expected 2" in str(error.value) or "the nearest is 3" in str(error.value)
    if len(devices) == 2:
        assert place(2, CPU, devices).devices == devices, "virtual devices have no end"


@relaxed
@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.data())
def test_layers_are_with_their_stage(devices: list[int], data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, 4)) for _ in devices]
    fence = tuple(itertools.accumulate(sizes, initial=0))
    placement = place(len(devices), GPUS, tuple(devices))
    owners = [device for device, size in zip(devices, sizes, strict=True) for _ in range(size)]
    assert resident_devices(fence, placement, sharded=True) == tuple(owners)
    assert [placement.layer_device(fence, layer) for layer in range(fence[-1])] == owners
    assert placement.layer_device(fence, fence[-1] + 3) == devices[-1]
    together = resident_devices(fence, placement, sharded=False)
    assert together == (devices[-1],) * fence[-1]
    assert not Residency(together, placement.primary).sharded_cross_device


@pytest.mark.parametrize(
    ("layers", "primary", "remote"),
    [
        ((0, 0, 0), 0, ()),
        ((0, 0, 1), 1, (0, 1)),
        # All on one device, and not on the one that walks: counting devices would miss it.
        ((1, 1, 1), 0, (0, 1, 2)),
        ((1, 1, 1), 1, ()),
    ],
)
def test_residency_is_where_weights_are(
    layers: tuple[int, ...], primary: int, remote: tuple[int, ...]
) -> None:  # pipeline G55
    residency = Residency(layers, primary)
    assert residency.remote_layers == remote
    assert residency.sharded_cross_device is bool(remote)
