# The bash kernel of the code interpreter. Descriptor 0 is a socket: a line is
# the number of a cell and the path of a file with it, and events go back as JSON lines. The cell
# runs in this shell, so variables, functions and the directory stay.
exec {__warren_control}<&0
exec </dev/null
__warren_count=0
trap : INT
printf '{"type":"ready"}\n' >&$__warren_control
while IFS=' ' read -r __warren_number __warren_cell <&$__warren_control; do
    __warren_count=$((__warren_count + 1))
    printf '{"type":"number_of_executions","execution_count":%d}\n' $__warren_count >&$__warren_control
    . "$__warren_cell" {__warren_control}>&-
    __warren_status=$?
    if [ $__warren_status -ne 0 ]; then
        printf '{"type":"error","name":"ExitStatus","value":"%d","traceback":"exit status %d"}\n' \
            $__warren_status $__warren_status >&$__warren_control
    fi
    printf '{"type":"end_of_execution","cell":%d}\n' "$__warren_number" >&$__warren_control
done
