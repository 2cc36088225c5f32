"""The decoding algorithm: propose, verify, commit, in one `lax.while_loop`."""
