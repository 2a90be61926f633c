"""Every kernel at M3's shapes, beside its byte or FLOP floor and its peer, on one GPU."""
