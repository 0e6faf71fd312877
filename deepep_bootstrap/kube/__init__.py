"""Kubernetes' words: the names of labels, annotations and resources that the API and its extensions define, and the
forms that names, quantities and image references must have; the API of a cluster.

Entry points: names.DNS_LABEL and the other forms, names.image_fault; client.connect, a cluster as kubectl reaches it.
The only package that may import the client library, and that inside a function: it is an optional extra.

Must not know: what is run in a cluster and why.
"""
