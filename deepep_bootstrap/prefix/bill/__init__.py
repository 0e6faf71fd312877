"""What a generation says of where its parts come from and under which licences.

`sbom` writes the bill of materials (CycloneDX), `provenance` reads what it is made of and puts it into a generation,
`licenses` finds the licence of each source and wheel.
"""
