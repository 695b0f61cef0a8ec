"""Multi-token prediction (MTP, NextN) layers."""
