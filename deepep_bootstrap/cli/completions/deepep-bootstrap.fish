# Completion of deepep-bootstrap for fish, as `deepep-bootstrap completion fish` prints it.

function __deepep_bootstrap_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l found ($words[1] --complete $words[2..-1] "$current" 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
        return
    end
    # Where nothing is known, files are.
    set -l parts (string split -m 1 = -- "$current")
    if test (count $parts) -eq 2
        for path in (__fish_complete_path "$parts[2]")
            echo "$parts[1]=$path"
        end
    else
        __fish_complete_path "$current"
    end
end

complete -c deepep-bootstrap -f -a '(__deepep_bootstrap_complete)'
