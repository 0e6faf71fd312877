# Completion of deepep-bootstrap for bash, as `deepep-bootstrap completion bash` prints it.
# shellcheck shell=bash

_deepep_bootstrap() {
    local line value current words
    # readline cuts words at "=", we do not.
    line=${COMP_LINE:0:COMP_POINT}
    read -ra words <<<"$line"
    [[ $line != *[[:space:]] ]] || words+=("")
    current=${words[${#words[@]} - 1]}
    COMPREPLY=()
    while IFS= read -r line; do
        value=${line%%$'\t'*}
        [[ $value != *= ]] || compopt -o nospace 2>/dev/null
        # What stands before the "=" is in the line already.
        [[ $current == *=* && $COMP_WORDBREAKS == *=* ]] && value=${value#*=}
        COMPREPLY+=("$value")
    done < <("${words[0]}" --complete "${words[@]:1}" 2>/dev/null)
}
# Where nothing is known, files are.
complete -o default -F _deepep_bootstrap deepep-bootstrap
