// fmt, CPU stand-in: the one function that the stand-in DeepEP V2 calls. Nothing in it comes from fmt.
#ifndef STANDIN_FMT_FORMAT_H
#define STANDIN_FMT_FORMAT_H

#include <string>

namespace fmt {

// Replaces each {} by the next number.
inline std::string format(std::string text) { return text; }

template <typename... Rest>
std::string format(std::string text, int first, Rest... rest) {
    const auto place = text.find("{}");
    if (place != std::string::npos) text.replace(place, 2, std::to_string(first));
    return format(text, rest...);
}

}  // namespace fmt

#endif
